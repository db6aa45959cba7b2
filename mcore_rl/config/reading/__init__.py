"""From the text of files and command lines to values that fit the schema."""
