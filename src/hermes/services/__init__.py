"""Operations on sessions, runs, jobs, skills, memory, models and health, for HTTP, command line and tools."""
