"""The tools, each by itself and in turns of a scripted model."""
