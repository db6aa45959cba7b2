"""What can be refused before a process starts, and the inputs that passed."""
