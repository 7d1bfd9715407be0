"""Chapter 3: movement. The same bytes elsewhere: what a good address costs, and a bad one."""
