"""The page and the HTTP routes. Knows no torch and no queue: it submits and reads the database."""
