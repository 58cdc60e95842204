from agro.io.terminal import cut, plain, visible


def test_what_a_terminal_would_obey_is_escaped() -> None:
    assert (
        visible("a\x1b[31m\x07\x7f\x9b\r\u202e\u2028\ud800é日\n\t")
        == "a\\x1b[31m\\x07\\x7f\\x9b\\r\\u202e\\u2028\\ud800é日\n\t"
    )


def test_a_cut_says_how_much_is_missing() -> None:
    assert cut("abcdef", 4) == "abcd … 2 more characters"
    assert cut("abcdef", 6) == cut("abcdef", 0) == "abcdef"


def test_messages_are_one_text() -> None:
    assert (
        plain([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}])
        == "system: Be brief.\nuser: Hi"
    )
