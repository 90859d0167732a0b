"""The oracle: a history-true reference, the rule of equality, and a checked engine over both."""
