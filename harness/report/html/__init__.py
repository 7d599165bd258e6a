"""Write the report as a page of HTML."""
