"""Twenty texts of many kinds, about 100 to 200 tokens each, to compare distributions on."""

from __future__ import annotations

import common

CANDLES = common.ROOT / "serving" / "data" / "eurusd_1h.csv"

WRITTEN = (
    # Prose
    """The harbour had been quiet since the last ferry left. Marta sat on an upturned crate and
watched the gulls quarrel over a strip of netting, wondering whether her brother would really come.
He had promised so often that the promise had worn smooth, like a coin nobody could read any more.
When the lamp at the end of the pier finally came on, she stood up, brushed the salt from her coat
and walked home without looking back.""",
    """Photosynthesis converts light energy into chemical energy. In the light-dependent reactions,
chlorophyll absorbs photons and water is split, releasing oxygen. The resulting ATP and NADPH drive
the Calvin cycle, in which carbon dioxide is fixed by the enzyme rubisco and reduced to sugars. The
rate depends on light intensity, temperature and the concentration of carbon dioxide, and in most
plants it saturates well below full sunlight.""",
    """The Treaty of Westphalia, signed in 1648 in the cities of Osnabrück and Münster, ended the
Thirty Years' War in the Holy Roman Empire and the Eighty Years' War between Spain and the Dutch
Republic. It recognised the independence of Switzerland and the Netherlands, confirmed the
principle that each prince could determine the religion of his own state, and is often named as the
beginning of the modern system of sovereign states.""",
    """Preheat the oven to 200 degrees. Rub the butter into the flour with your fingertips until it
looks like breadcrumbs, stir in the sugar and a pinch of salt, then add just enough cold water to
bring the dough together. Wrap it and let it rest in the fridge for half an hour. Peel and slice the
apples, toss them with cinnamon and lemon juice, and arrange them over the rolled-out pastry in
overlapping circles before baking for forty minutes.""",
    """Dear Ms. Okafor,

Thank you for your letter of 12 March. We have looked into the delay of your order and found that
the parcel was returned to our warehouse because the address label had been damaged in transit. A
replacement was sent this morning by express delivery and should reach you by Thursday. As an
apology we have refunded the shipping costs and added a voucher to your account.

Kind regards,
Customer Service""",
    """"You can't be serious," said the inspector, putting down his cup. "Nobody walks into a bank,
leaves a million in cash on the counter and disappears."

"And yet there it is," the manager replied. "We counted it twice."

"Fingerprints?"

"None. Not even on the band around the notes. The camera shows a man in a grey hat, but he never
looks up." He hesitated. "There was a note as well. It only says: for the roof." """,
    # Code
    """import heapq
from collections import defaultdict


def shortest_paths(edges, source):
    graph = defaultdict(list)
    for start, end, weight in edges:
        graph[start].append((end, weight))
    distances = {source: 0}
    queue = [(0, source)]
    while queue:
        distance, node = heapq.heappop(queue)
        if distance > distances[node]:
            continue
        for neighbour, weight in graph[node]:
            candidate = distance + weight
            if candidate < distances.get(neighbour, float("inf")):
                distances[neighbour] = candidate
                heapq.heappush(queue, (candidate, neighbour))
    return distances
""",
    """#include <stdio.h>
#include <stdlib.h>

typedef struct node {
    int value;
    struct node *next;
} node;

static node *push(node *head, int value) {
    node *fresh = malloc(sizeof *fresh);
    if (fresh == NULL) {
        perror("malloc");
        exit(EXIT_FAILURE);
    }
    fresh->value = value;
    fresh->next = head;
    return fresh;
}

int main(void) {
    node *head = NULL;
    for (int i = 0; i < 10; ++i) head = push(head, i * i);
    for (node *at = head; at != NULL; at = at->next) printf("%d\\n", at->value);
    return 0;
}
""",
    """SELECT c.name, COUNT(o.id) AS orders, SUM(o.total) AS revenue
FROM customers AS c
LEFT JOIN orders AS o ON o.customer_id = c.id AND o.created_at >= DATE '2024-01-01'
WHERE c.country IN ('DE', 'FR', 'NL')
GROUP BY c.id, c.name
HAVING SUM(o.total) > 1000
ORDER BY revenue DESC
LIMIT 20;

CREATE INDEX orders_by_customer ON orders (customer_id, created_at);
UPDATE customers SET segment = 'gold' WHERE id IN (SELECT customer_id FROM big_spenders);
""",
    """<!DOCTYPE html>
<html lang="en">
<head>
  <meta charset="utf-8">
  <title>Opening hours</title>
  <style>
    table { border-collapse: collapse; }
    td, th { padding: 0.3em 1em; border: 1px solid #ccc; }
  </style>
</head>
<body>
  <h1>Opening hours</h1>
  <table>
    <tr><th>Day</th><th>From</th><th>To</th></tr>
    <tr><td>Monday</td><td>09:00</td><td>17:30</td></tr>
    <tr><td>Saturday</td><td>10:00</td><td>13:00</td></tr>
  </table>
</body>
</html>
""",
    # Tables and structured data
    """| country | capital | population (millions) | area (km2) |
|---|---|---|---|
| Austria | Vienna | 9.1 | 83,879 |
| Belgium | Brussels | 11.7 | 30,689 |
| Denmark | Copenhagen | 5.9 | 42,925 |
| Estonia | Tallinn | 1.4 | 45,339 |
| Finland | Helsinki | 5.6 | 338,455 |
| Greece | Athens | 10.4 | 131,957 |
| Ireland | Dublin | 5.3 | 70,273 |
""",
    """{"id": 4711, "status": "shipped", "customer": {"name": "A. Kowalska", "city": "Gdynia"},
"items": [{"sku": "LMP-20", "quantity": 2, "price": 19.90}, {"sku": "CBL-05", "quantity": 1,
"price": 4.50}], "total": 44.30, "currency": "EUR", "tracking": null, "tags": ["gift", "express"],
"created_at": "2024-05-17T08:31:22Z", "updated_at": "2024-05-18T14:02:10Z"}
""",
    """2024-05-17 08:31:22,114 INFO  server: listening on 127.0.0.1:8080
2024-05-17 08:31:25,870 INFO  request: GET /health 200 3 ms
2024-05-17 08:31:29,002 WARN  pool: 14 of 16 connections in use
2024-05-17 08:31:29,517 ERROR request: POST /orders 503 1204 ms
2024-05-17 08:31:29,518 ERROR request: timed out while waiting for a connection
2024-05-17 08:31:31,040 INFO  pool: grown to 32 connections
""",
    # Other languages
    """Die Bahn hielt auf freier Strecke, und niemand wusste, warum. Nach einer Viertelstunde
knackte es im Lautsprecher, aber die Ansage war so leise, dass man nur das Wort Signalstörung
verstand. Eine ältere Dame packte ihre Brote aus und bot dem jungen Mann gegenüber eines an. So
kamen sie ins Gespräch, über Enkel, Wälder und verpasste Anschlüsse, und als der Zug endlich
weiterfuhr, war es beiden fast zu früh.""",
    """Le matin, la place du village sentait le pain chaud et la pluie. Les marchands installaient
leurs étals en parlant fort, et le vieux chien du boulanger dormait toujours au même endroit, devant
la porte, si bien que tout le monde devait l'enjamber. Camille acheta des cerises, un fromage de
chèvre et le journal, puis s'assit au café pour lire les annonces en attendant sa sœur.""",
    """El invierno llegó tarde aquel año. En las montañas la nieve no cayó hasta febrero, y los
pastores, acostumbrados a leer el cielo, no sabían qué pensar. Mi abuela decía que los almendros se
habían equivocado de mes. Cuando por fin heló, las flores ya estaban abiertas y el pueblo entero
salió de noche a encender hogueras entre los árboles para salvar la cosecha.""",
    """Поезд пришёл ранним утром. На платформе почти никого не было, только дежурный с флажком и
женщина в синем пальто.""",
    """Question: A train leaves at 9:40 and travels 210 km at an average speed of 84 km/h. When does
it arrive?
Answer: The journey takes 210 / 84 = 2.5 hours, that is 2 hours and 30 minutes. Starting at 9:40,
the train arrives at 12:10.

Question: A shop sells pencils at 3 for 2 euros. How much do 18 pencils cost?
Answer: 18 pencils are 6 times 3 pencils, so they cost 6 * 2 = 12 euros.

Question: What is 15% of 240?
Answer:""",
)


def texts() -> list[str]:
    """Return the texts that were written for this, and two of candles."""
    lines = CANDLES.read_text(encoding="utf-8").splitlines()
    columns = [line.split(",") for line in lines[40:43]]
    spoken = [f"{row[0][:16]} open {row[1]} high {row[2]} low {row[3]}" for row in columns]
    return [*WRITTEN, "\n".join(lines[:3]) + "\n", "\n".join(spoken) + "\n"]
