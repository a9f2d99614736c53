# What scripts do that need the sources of a project of GitHub: sourced, with `folder` and `log` set; gives `source_of`.

source_of() {  # source_of OWNER/NAME COMMIT [FOLDER]: its files in DIR/FOLDER or DIR/NAME, with a mark of the commit
  local to=$folder/${3:-${1#*/}}
  [ -e "$to/.commit" ] && [ "$(cat "$to/.commit")" = "$2" ] && return
  if [ -e "$to" ] && ! [ -e "$to/.commit" ]; then
    echo "$to was not fetched by this script and is taken as it is; the tests are of $1 at $2"
    return
  fi
  local part=$to.part
  rm -rf "$part" && mkdir "$part"
  if curl -fsSL --max-time 120 "https://codeload.github.com/$1/tar.gz/$2" 2>>"$log" | tar -xz -C "$part" --strip-components 1 2>>"$log"; then
    echo "$2" >"$part/.commit"
    rm -rf "$to" && mv "$part" "$to"
  else
    rm -rf "$part"
    echo "$1 cannot be fetched (see $log), so its tests are left out. To run them, put its files at commit $2 into $to," \
      "such as by: mkdir -p $to && git -C A_CLONE_OF_IT archive $2 | tar -x -C $to"
  fi
}
