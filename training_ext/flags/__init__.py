"""The command line: parser, checks, recipes and the dry run."""
