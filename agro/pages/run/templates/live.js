// Replaces the contents where the page has changed; what was chosen, opened and scrolled to stays.
let seen = null;
const kept = () => [[...document.querySelectorAll('input:checked')].map(e => e.id),
                    [...document.querySelectorAll('details')].map(e => e.open)];
const look = async () => {
  try {
    const answer = await fetch('/', {headers: seen ? {'If-None-Match': seen} : {}, cache: 'no-store'});
    if (answer.status === 200) {
      const next = new DOMParser().parseFromString(await answer.text(), 'text/html');
      const [chosen, opened] = kept();
      document.body.replaceChildren(...next.body.children);
      chosen.forEach(id => { const e = document.getElementById(id); if (e) e.checked = true; });
      document.querySelectorAll('details').forEach((e, i) => { e.open = !!opened[i]; });
      document.dispatchEvent(new Event('replaced'));
      seen = answer.headers.get('ETag');
    }
  } catch (error) { /* the server has ended: the page stays as it is */ }
  setTimeout(look, 2000);
};
look();
