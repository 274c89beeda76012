"""Policy-gradient losses: small pure functions from token logprobs to token losses."""
