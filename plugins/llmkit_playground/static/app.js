// The parts of the page that know of both: the key, and who asks the server.
import { startChat } from "./chat.js";
import { startLiveView } from "./live.js";

const dialog = document.getElementById("key-dialog");
const changeKey = document.getElementById("change-key");
let asking = null;

export function urlOf(path) {
  return new URL(path, document.baseURI);
}

// `fetch` with the key; when the server wants another one, the user is asked, and the request made again.
export async function ask(path, options = {}) {
  for (;;) {
    const key = sessionStorage.getItem("llmkit-key");
    const headers = { ...options.headers, ...(key ? { authorization: `Bearer ${key}` } : {}) };
    const response = await fetch(urlOf(path), { ...options, headers });
    if (response.status !== 401) return response;
    await askForKey(key ? "The server does not know this key." : "");
  }
}

function askForKey(problem) {
  if (asking) return asking;
  changeKey.hidden = false;
  document.getElementById("key-error").textContent = problem;
  const input = document.getElementById("key");
  input.value = "";
  dialog.showModal();
  input.focus();
  asking = new Promise((done) => {
    dialog.addEventListener("close", () => {
      asking = null;
      if (input.value) sessionStorage.setItem("llmkit-key", input.value.trim());
      done();
    }, { once: true });
  });
  return asking;
}

changeKey.addEventListener("click", () => askForKey(""));
// Without a key there is nothing to see: Escape must not close the question.
dialog.addEventListener("cancel", (event) => event.preventDefault());

startChat(ask);
startLiveView(ask);
