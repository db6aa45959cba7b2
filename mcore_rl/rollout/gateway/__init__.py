"""Gateway: an OpenAI-compatible server through which programs that know nothing of this project are trained."""
