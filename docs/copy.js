/* What a copy button copies of a block with prompts: the commands, without "$ " and without their output. */
const commands = (text) => {
  const lines = text.split("\n");
  const found = [];
  let goes_on = false; // a command ends in a backslash where the next line belongs to it
  for (const line of lines) {
    const begins = line.startsWith("$ ");
    if (begins || goes_on) found.push(begins ? line.slice(2) : line);
    goes_on = (begins || goes_on) && line.endsWith("\\");
  }
  return found.join("\n");
};
document.addEventListener("click", (event) => {
  const button = event.target.closest?.("[data-clipboard-target]");
  const block = button && document.querySelector(button.dataset.clipboardTarget);
  if (block && /^\$ /m.test(block.textContent)) button.dataset.clipboardText = commands(block.textContent);
}, true); // before the theme's own listener, which reads it
