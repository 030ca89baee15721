"""Process groups whose collectives name their caller in errors, and checks across ranks."""
