// CodeContests' own comparison of outputs, OUTPUTS_MATCH, as a program: lines "M N" and then M and N bytes, of an
// output and of the expected one, on standard input; a 0 or 1 for each on standard output. The functions of Abseil that
// it uses are implemented here with the standard library, by Abseil's documentation.
#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <functional>
#include <iostream>
#include <limits>
#include <numeric>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

namespace absl {
using std::string_view;

struct ByAnyChar {
  string_view characters;
};
struct SkipEmpty {};

inline std::vector<std::string> StrSplit(string_view text, ByAnyChar by, SkipEmpty) {
  std::vector<std::string> parts;
  for (size_t place = 0; (place = text.find_first_not_of(by.characters, place)) != string_view::npos;) {
    const size_t end = std::min(text.find_first_of(by.characters, place), text.size());
    parts.emplace_back(text.substr(place, end - place));
    place = end;
  }
  return parts;
}

inline std::string AsciiStrToLower(string_view text) {
  std::string lower(text);
  for (char& c : lower) {
    if (c >= 'A' && c <= 'Z') c += 'a' - 'A';
  }
  return lower;
}

inline string_view Stripped(string_view text) {
  const char* blanks = " \t\n\v\f\r";
  const size_t first = text.find_first_not_of(blanks);
  if (first == string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(blanks) - first + 1);
}

inline bool WithoutPlus(string_view& text) {
  text = Stripped(text);
  if (text.empty() || text[0] != '+') return true;
  text.remove_prefix(1);
  return text.empty() || (text[0] != '-' && text[0] != '+');
}

inline bool SimpleAtoi(string_view text, int* value) {
  if (!WithoutPlus(text)) return false;
  const auto end = text.data() + text.size();
  const auto found = std::from_chars(text.data(), end, *value);
  return found.ec == std::errc() && found.ptr == end;
}

inline bool SimpleAtod(string_view text, double* value) {
  *value = 0.0;
  if (!WithoutPlus(text)) return false;
  const auto end = text.data() + text.size();
  const auto found = std::from_chars(text.data(), end, *value);
  if (found.ec == std::errc::invalid_argument || found.ptr != end) return false;
  if (found.ec == std::errc::result_out_of_range) *value = std::strtod(std::string(text).c_str(), nullptr);
  return true;
}
}  // namespace absl

#include OUTPUTS_MATCH

int main() {
  size_t n_output, n_expected;
  while (std::cin >> n_output >> n_expected) {
    std::cin.get();
    std::string output(n_output, '\0'), expected(n_expected, '\0');
    std::cin.read(output.data(), n_output);
    std::cin.read(expected.data(), n_expected);
    std::cout << (OutputsMatch(output, expected) ? '1' : '0');
  }
}
