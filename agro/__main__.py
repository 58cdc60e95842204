from agro.cli import main

main()
