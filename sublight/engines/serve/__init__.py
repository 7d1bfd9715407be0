"""`sublight serve`: the generate engine behind OpenAI's protocol."""
