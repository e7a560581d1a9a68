"""Running servers, called by users with and without rights, with messages of any content."""
