"""The report as CI shows it: JUnit, SARIF, annotations, and a comment on a pull request."""
