"""The HTTP client for model providers and web pages."""
