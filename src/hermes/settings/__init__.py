"""The settings: their keys, where their values come from, and how they are written."""
