"""Programs of sessions: commands in the sandbox and users' functions, and the worker that runs them."""
