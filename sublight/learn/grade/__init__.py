"""The grader: what a submission may contain, the processes that run it, and the judgement, which the parent makes."""
