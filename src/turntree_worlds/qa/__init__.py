"""Question answering with tools: questions, their environment, an expert, a generated world to ask about."""
