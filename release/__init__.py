"""What makes a release: locked dependencies, their audit, a wheel that anybody can build again. `make dist` and its
neighbours run it from the repository's root; no program of Muster imports it."""
