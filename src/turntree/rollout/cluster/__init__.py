"""Work given to processes on a Ray cluster, whoever of them dies. It knows units and results, not what they mean."""
