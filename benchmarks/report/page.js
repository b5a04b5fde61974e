// Copies the run's JSON, which is in the link beside the button. The page is opened from disk.
"use strict";
const button = document.getElementById("copy");
const shown = document.getElementById("copied");
const data = () => atob(document.getElementById("data").href.split(",")[1]); // JSON in ASCII

// For browsers that have no clipboard API on a page from disk: the old command, else text to copy by hand.
function copyOldWay(text) {
  const area = document.createElement("textarea");
  area.value = text;
  area.readOnly = true;
  button.parentElement.append(area);
  area.select();
  const done = document.execCommand("copy");
  if (done) area.remove();
  return done;
}

button.addEventListener("click", async () => {
  const text = data();
  for (const left of document.querySelectorAll("textarea")) left.remove();
  let done;
  try {
    await navigator.clipboard.writeText(text);
    done = true;
  } catch {
    done = copyOldWay(text);
  }
  shown.textContent = done ? `Copied ${text.length.toLocaleString()} characters.` : "Copy the marked text.";
});
button.hidden = false; // without scripts there is the link alone
