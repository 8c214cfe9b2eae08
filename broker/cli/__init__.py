"""The command line: flags in, lines and exit codes out."""
