"""What all tools share: what a tool is, how its calls are run, approved and limited, and what they can reach."""
