"""The processes of a run, one file for each kind: its body, the driver's handle of all of them, how they are set up."""
