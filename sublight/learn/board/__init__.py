"""The leaderboard: entries in SQLite, pages, and a sandbox in which the server runs what it ranks."""
