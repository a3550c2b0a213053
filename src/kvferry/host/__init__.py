"""What this machine lends us: files of this user's alone, and a compiler where there is one."""
