"""The command line and what stands behind it; nothing here does array maths."""
