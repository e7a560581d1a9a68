"""One module for each family of parsers. Each has a function `check` of bytes. None knows of a fuzzing engine."""
