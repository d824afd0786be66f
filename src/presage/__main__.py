from presage.cli import main

main()
