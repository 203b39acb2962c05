"""Names of people, jobs, rivers and towns, for worlds that need some: plain letters, each once."""

FIRST_NAMES = tuple(
    """
    Ada Adil Agnes Aiko Alba Alma Amara Amir Anouk Anton Arash Astrid Aya Bela Bianca Bilal Boris Bruno
    Camila Carmen Cedric Celia Chidi Clara Dalia Damir Daniel Dara Delia Diego Dilara Dora Edgar Elena Elif
    Elsa Emil Enzo Erik Esra Eva Fabio Farah Felix Fiona Flora Frida Gabor Gemma Georg Gita Goran Greta Hana
    Hanno Hassan Hector Helga Henrik Hugo Ibrahim Ida Igor Ilse Imani Ines Irina Ivan Jada Jakob Jasmin
    Javier Jelena Joana Jonas Judith Kaito Karim Karla Kenji Kiran Klara Kofi Kwame Laila Lars Layla Lena
    Leon Lina Lorenz Lucia Luis Magda Malik Marco Marta Mateo Maya Mehmet Mia Mikael Milan Mina Mirja Nadia
    Naoko Nelson Nina Noah Nora Odile Olaf Olga Omar Oscar Otto Pablo Paula Pedro Petra Pia Priya Quentin
    Rafael Rania Raul Renata Rita Rosa Ruben Sadia Salma Samir Sara Selim Sofia Sven Tamar Tariq Tessa Theo
    Tilda Tomas Ulla Umar Uri Vera Viktor Vito Wanda Wim Yara Yusuf Zara Zeno Zoe
    """.split()  # noqa: SIM905
)
LAST_NAMES = tuple(
    """
    Abadi Adler Aguilar Ahmadi Almeida Amato Anders Aoki Arslan Avila Baker Banerjee Barros Bauer Becker
    Bellini Berg Bianchi Blanc Boateng Bodnar Brandt Bruck Cabrera Calvo Carter Castro Chavez Colombo Conti
    Costa Cruz Dahl Dalton Danso Delgado Demir Dietz Dubois Duran Eckert Egger Ekstrom Engel Eriksen Evans
    Farkas Faure Ferrari Fischer Flores Forster Franco Fuchs Gallo Garcia Gomez Graf Greco Gruber Gupta Haas
    Haddad Hansen Hartman Heller Herrera Hoffman Horvat Ibarra Ionescu Ivanov Jansen Jensen Jovanov Kaplan
    Kato Keller Khan Kimura Klein Kovacs Kraus Kumar Lange Larsen Lemaire Leone Lindt Lopez Lund Maier
    Mancini Marek Martins Mbeki Mendez Meyer Molnar Moreau Mori Moser Nagy Nakata Navarro Nemeth Nilsen
    Novak Obi Okafor Olsen Ortega Osman Owens Pereira Petrov Pinto Popescu Porter Prado Quiroga Rahman Ramos
    Reyes Ricci Rivera Romano Rossi Roth Sahin Salazar Sato Schulz Serra Silva Simon Singh Sousa Steiner
    Suzuki Takeda Tanaka Tesfaye Torres Ueda Urban Vargas Vega Vidal Vogel Wagner Walker Weber Winter Wolf
    Yadav Yilmaz Zamora Zhang Ziegler
    """.split()  # noqa: SIM905
)
JOBS = tuple(
    """
    actor baker carpenter chemist dancer dentist diver farmer gardener geologist hairdresser joiner juggler
    lawyer locksmith miller nurse painter pilot plumber poet potter printer sailor shepherd singer surgeon
    tailor teacher translator violinist weaver
    """.split()  # noqa: SIM905
)
RIVERS = tuple(
    """
    Ardle Bessin Calder Dovra Elwy Feshie Garnock Hodder Irthing Jura Kennet Lossie Mease Nadder Orwin Pinn
    Quenza Roding Sence Teviot Umber Velda Waring Yarrow
    """.split()  # noqa: SIM905
)
_STARTS = (
    "Alder Bram Cor Dun Elm Fen Glen Hal Kirk Lin Mar Nor Oak Pen Ros Sten Thorn Wex Yar".split()  # noqa: SIM905
)
_ENDS = "bridge bury dale field ford ham mouth ton wick worth".split()  # noqa: SIM905
TOWNS = tuple(start + end for start in _STARTS for end in _ENDS)
