"""What jaxmem itself takes: importing, planning, compiling."""
