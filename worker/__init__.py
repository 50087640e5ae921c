"""Settings, the queue, the workers that hold a release in memory, tables and the command line."""
