"""Sources of data.train and data.val: files, directories, saved data sets; and options of single rows."""
