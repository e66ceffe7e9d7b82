"""Tasks: one verb of the command line per file. Each is built from conf/task and called with the Config."""
