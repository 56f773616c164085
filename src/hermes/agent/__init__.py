"""The agent itself: the loop (model, tools, model), what it is made of, and its façade `AIAgent`."""
