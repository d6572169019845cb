from fourwave.cli import main

main()
