#!/usr/bin/env bash
# Downloads the programs of the presets into the farm's cache, 4 GB, unless they exist: environment.sh FARM, where FARM
# is the command. A program that is not available here is reported, and its tests fail with the reason.
set -uo pipefail

for agent in claude-code codex opencode qwen-code gemini-cli mini-swe-agent openhands smolagents openai-agents pydantic-ai \
  langgraph aider; do
  echo "installing $agent"
  said=$("$1" images pull --agent "$agent" 2>&1) || echo "$said"
done
