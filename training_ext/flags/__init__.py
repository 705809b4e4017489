"""The command line: parser, help, checks and recipes."""
