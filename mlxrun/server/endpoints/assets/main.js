// Joins the views of the page. The part of the address after # names the one that is shown.

import { setUpKeys } from "./api.js";
import { setUpBatches } from "./batches.js";
import { setUpChat } from "./chat.js";
import { byId } from "./dom.js";
import { setUpServer } from "./server.js";

const VIEWS = ["chat", "server", "batches"];

function showView() {
  const wanted = VIEWS.find((name) => location.hash === `#${name}`) ?? VIEWS[0];
  for (const name of VIEWS) byId(`${name}-view`).hidden = name !== wanted;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${wanted}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `${wanted[0].toUpperCase()}${wanted.slice(1)} – mlxrun`;
  document.body.dataset.view = wanted;
}

addEventListener("hashchange", showView);
byId("skip").addEventListener("click", (event) => {
  event.preventDefault();
  byId("main").focus();
});
showView();
setUpKeys();
setUpChat();
setUpServer();
setUpBatches();
