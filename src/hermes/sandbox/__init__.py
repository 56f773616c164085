"""Where a command is allowed to run: one backend per module. Built with the tools that start processes."""
