#!/usr/bin/env bash
# The programs of the presets, in the farm's cache: environment.sh FARM, where FARM is the command. 4 GB, unless they are
# there. One that cannot be had here is told, and its tests fail with the reason.
set -uo pipefail

for agent in claude-code codex opencode qwen-code gemini-cli mini-swe-agent openhands smolagents openai-agents pydantic-ai \
  langgraph aider; do
  echo "installing $agent"
  said=$("$1" images pull --agent "$agent" 2>&1) || echo "$said"
done
