"""What components share: rows and keys of the train data, readers of shards and csv files, files of checkpoints."""
