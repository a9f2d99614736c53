"""Programs that build, hold and limit a sandbox; standard library only, as they must stay small."""
