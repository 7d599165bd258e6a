"""Forms of the report for CI: JUnit, SARIF, annotations, and a comment on a pull request."""
