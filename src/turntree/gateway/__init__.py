"""An OpenAI-compatible server in front of an engine: agents of any framework sample through it, and the calls of their
sessions become rollout trees."""
