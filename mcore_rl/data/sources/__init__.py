"""What data.train and data.val name: files, directories, what `datasets` saved; and what rows ask for themselves."""
