// Replaces the content when the page has changed, and keeps selections, open sections and the scroll position.
let seen = null;
const state = () => [[...document.querySelectorAll('input:checked')].map(e => e.id),
                     [...document.querySelectorAll('details')].map(e => e.open)];
const look = async () => {
  try {
    const answer = await fetch('/', {headers: seen ? {'If-None-Match': seen} : {}, cache: 'no-store'});
    if (answer.status === 200) {
      const next = new DOMParser().parseFromString(await answer.text(), 'text/html');
      const [chosen, opened] = state();
      document.body.replaceChildren(...next.body.children);
      chosen.forEach(id => { const e = document.getElementById(id); if (e) e.checked = true; });
      document.querySelectorAll('details').forEach((e, i) => { e.open = !!opened[i]; });
      document.dispatchEvent(new Event('replaced'));
      seen = answer.headers.get('ETag');
    }
  } catch (error) { /* the server has ended: keep the page */ }
  setTimeout(look, 2000);
};
look();
